"""How a network is spread over devices: strategies, precision, compilation; put on the network from outside."""
