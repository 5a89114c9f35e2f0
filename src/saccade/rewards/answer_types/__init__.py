"""Answer types, one class per file: which ground truths are valid, how rows write them, how an answer is scored.

A task names one (`answer_type`), by a name of the class or by the path of a file. Settings in a recipe are those of
`rewards.accuracy.settings.answer_types.FILE`.
"""
