"""A model of training on many workers: the real schedules of pipeline/schedule.py, executed by a clock that only counts.

constants.py  what a worker and its network cost        calibrate.py  fits them to recorded traces
costs.py      what each event of a schedule does        engine.py     when, over lanes, cores and the wire
cores.py      who runs where workers share cores        arms.py       ways to train, and what a step takes
published.py  beside the published table

Everything that comes out of here is a model and says so.
"""
