"""The settings of every command, in words of Hydra and pydantic.

- A key is declared once, with its type and bound. A key of a section without a target, such as geometry.n_views, stands
  in the class of its section: `sections`, `data`, and `run` for keys without a section. A key of a section that names a
  class or function, such as model.n_iterations, stands in the signature of that class or function. A key of another
  command than train stands in the file `config.py` beside the code of that command.
- Its default is in conf/, in the file of its option. A default in a class is for older files that lack the key.
- It is checked by pydantic: `run.parse` for a command, `run.parse_file` and then `run.checked` for somebody's file.
  A rule inside a section is a validator of its class. Rules between sections are in `rules`.
- It is explained by the comment beside its default, which --help shows. `checking` says in one line what is wrong, with
  `answers.yaml` for words of elsewhere. `qnmixer.engine.cli` does so for words that Hydra does not take.

Hydra composes conf/ (`compose`). No torch here, so that help and completion are there in a moment. The classes that a
config names load it.
"""
