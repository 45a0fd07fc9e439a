"""`nestpipe report`: one self-contained HTML file per run.

inputs.py     reads the run folder; what is missing or damaged becomes a note
quality.py    curves.py   steps.py   balance.py   settings.py     one section each
page.py       headline and sections as one file: no script, no request, light and dark, phone and paper
plots.py      html.py   number_format.py                          drawings, HTML elements, numbers as text
"""
