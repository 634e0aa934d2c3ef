"""The `gemm-tuner` command. One module per group of commands; heavy packages are imported only where used."""
