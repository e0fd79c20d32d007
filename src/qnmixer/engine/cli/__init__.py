"""A command line: its words, its help, and its one line for an error.

`command` runs a command. Before Hydra reads its words, `project` adds those of a project, and `texts` puts quotes
around texts that look like numbers. `errors` has the lines for errors of libraries, `help` prints --help.
"""
