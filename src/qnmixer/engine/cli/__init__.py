"""A command line: its words, its help, and its one line for an error.

`command` runs a command. Before Hydra reads its words, `project` adds those of a project, `texts` puts quotes around
texts that look like numbers, and `words` refuses what no config can take. `errors` has the lines for what Hydra, other
libraries and the system raise. `help` prints --help.
"""
