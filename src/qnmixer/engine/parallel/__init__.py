"""Spread a network over devices: strategies, precision and compilation, applied to the network from outside."""
