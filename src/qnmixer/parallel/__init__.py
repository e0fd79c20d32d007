"""Several devices: strategies, the pipeline over iterations, buffers, precision."""
