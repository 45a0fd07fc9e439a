"""Generation of items by their semantic ids: the ids, the tree of legal ids, the search in it."""
