"""Answer types, one class per file: which ground truths are valid, how rows write them, how an answer is scored.

A task's `answer_type` is the first of a class's `names`; a dataset can't name a file. A recipe lists files and settings
in `rewards.accuracy.settings.answer_types`. A file ends in `_` where Python has a module or function of its name.
"""
