"""One self-contained HTML file per run: what `nestpipe report` writes.

facts.py     what the folder of a run holds, and what is missing, each in one line
sections     quality.py curves.py steps.py balance.py settings.py: facts -> a part of the page
page.py      the sections as one file: no script, no outside request, light and dark, phone and paper
plot.py      drawings;   markup.py   text that cannot become markup;   numbers.py   one way to write numbers
"""
