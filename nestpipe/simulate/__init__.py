"""Simulates training on many workers: the real schedules of pipeline/schedule.py on a simulated clock.

constants.py        costs of a worker and its network       calibrate.py   fits them to recorded traces
costs.py            costs of each event of a schedule       cases.py       ways to train, and their step times
event_simulator.py  streams, cores and links over time      cpu_model.py   scheduling of threads on shared cores
published.py        comparison with the published table     advice.py      the one change that would help most

Every result is labelled as a model, not a measurement.
"""
