"""Elastic sequence parallelism: as many chips for each batch as it is worth."""
