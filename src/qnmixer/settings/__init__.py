"""The settings of every command, in words of Hydra and pydantic.

- A key is declared once, with its type and bound. A key of a section without a target, such as geometry.n_views,
  stands in the class of its section: `sections`, and `run` for keys without a section. A section that names a class or
  function (`target`: how; `parts` and `data`: which) declares in its class the keys that qnmixer itself uses, such
  as optimizer.lr and data.val_patients. All others, such as model.n_iterations, stand in the signature of what it
  names.
- The keys of another command than train stand in a class that names its command, in `COMMAND_config.py` by its code.
- Its default is in conf/, in the file of the option that conf/train.yaml, or the file of the command, names first. That
  file may include others, whose names begin with _. A default in a class is for older files that lack the key.
- It is checked by pydantic: `run.parse` for a run, `parse` of the class of another command, and for somebody's file
  `run.parse_file` and then `run.checked`, which reads signatures. A rule inside a section is a validator of its class.
  Rules between sections are in `rules`.
- It is explained by the comment beside its default, or by the docstring of what has it: --help=all shows either.
  `validation` says in one line what is wrong.

Hydra composes conf/ (`compose`). A program changes a config by `override`. No torch here, so that help and completion
are there in a moment. The classes that a config names load it.
"""
