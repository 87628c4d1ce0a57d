"""What `iglens_tl.report` puts a page together from: the data, the strips of tokens, what other methods say, the assets."""
