"""The settings of every command: a file for each folder of conf/, with the same name, and what all of them share.

No torch here, so that help and completion are there in a moment. It is loaded with the classes that a config names.
"""
