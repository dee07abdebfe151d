"""Comparisons of methods: many runs, which are tuned, trained and evaluated in parallel processes.

plan.py     what is trained: the methods, the settings to choose from, and the seeds; `compare` makes a comparison
tasks.py    training and evaluation of a run, in any process, and parallel processes that perform such tasks
results.py  metrics by seed and by request, and paired tests
"""
