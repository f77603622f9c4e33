"""From rows to a tuned model: every decision that measured facts can take, each stage a verb of its own.

settings.py    what a user may say; all but the model, the rows and a folder has a default
named_rows.py  the rows that a user names, checked before anything is made
row_files.py   the rows in the folder
record.py      what was decided and why, kept in the folder: a killed tuning goes on from it
decisions.py   facts -> decisions, pure
choosing.py    measures what decisions need, and takes them
tokenizing.py  what rows ask of the tokenizer
rates.py       the learning rate, by short runs
places.py      where runs take place
stages.py      rows -> bundle -> decisions -> runs -> scores -> adapter, report
command.py     the verb
"""
