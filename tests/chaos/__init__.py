"""Faults on real processes: `python -m tests.chaos` kills, freezes, cuts off and damages training.

trials.py     what happens in trial number N of a seed
faults.py     each kind of fault: what is promised, how it is done, what must hold afterwards
rank.py       one rank's training, which writes down all that happens to it
zygote.py     a process that has torch loaded and forks ranks from itself
stage.py      one run of a training: its ranks, store, network and disk
crew.py       plays trials one after another
report.py     the table of results

elastic.py    torchrun with ranks that die and come back
soak.py       memory, descriptors and threads over hours
"""
