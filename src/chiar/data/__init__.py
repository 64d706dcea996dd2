"""Corpora as token shards: written by `chiar data prepare`, opened by `shards.Corpus.open`."""
