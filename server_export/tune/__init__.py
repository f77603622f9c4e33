"""From rows to a tuned model: measured facts decide all settings, and each stage runs a verb.

settings.py            the user's settings; all except model, rows and folder have defaults
user_rows.py           reading and checking the user's rows
row_files.py           the rows in the folder of the tuning
prompt_rows.py         both for prompts, whose completions a reward scores
record.py              decisions and facts in the folder, from which an interrupted tuning continues
decisions.py           decisions as pure functions of facts
measured_decisions.py  measures the facts, and records the decisions
tokenizing.py          chat template and begin-of-sequence token
rates.py               search for the learning rate by short runs
machines.py            runs on this machine or on a phone
stages.py              rows -> bundle -> decisions -> runs -> scores -> adapter, report
command.py             the verb
"""
