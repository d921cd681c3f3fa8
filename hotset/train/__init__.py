"""``hotset.Model``: training, evaluation and prediction as calls, over the sink."""
