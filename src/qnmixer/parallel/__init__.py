"""Several devices: strategies, the pipeline over iterations, buffers, precision; what a step takes of their memory."""
