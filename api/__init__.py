"""HTTP service: jobs in, answers and exports out. It never compiles or measures; the tuner does that."""
