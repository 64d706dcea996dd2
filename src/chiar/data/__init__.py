"""Corpora as token shards: made once by `chiar data prepare`, opened by `shards.Corpus.open`."""
