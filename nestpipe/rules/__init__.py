"""Rules as data: which items may be shown, and how a list is made of those that may."""
