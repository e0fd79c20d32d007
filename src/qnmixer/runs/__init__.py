"""The folder of a run, its records and loggers, sweeps of runs, and their processes."""
