"""The settings of every command: how conf/ is composed, every key with its bounds, and rules between keys.

No torch here, so that help and completion are there in a moment. It is loaded with the classes that a config names.
"""
