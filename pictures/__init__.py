"""Pictures of stored results and of the performance model, as SVG: for files, documents and the service's pages."""
