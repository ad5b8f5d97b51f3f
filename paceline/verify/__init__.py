"""Does training with N ranks equal training in one process, for this model?"""
