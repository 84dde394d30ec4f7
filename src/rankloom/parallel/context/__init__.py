"""Context parallel: one sequence over many ranks. Each holds the activations of its own tokens only.

Two ways to let a query see keys that another rank owns:

    ring          keys and values travel once around the ring, p-1 hops. Each rank merges the attention of its queries to each block
                  into a running softmax. Backward they travel again, followed by their gradients.
    all_to_all    every rank trades its tokens of all heads for all tokens of some heads, attends alone, and trades back.
                  With as many key-value as query heads it sends forward 2/p of what a ring sends; but p is at most the number of heads.

No rank ever holds the scores of all tokens against all, nor, in a ring, the keys of all. Nothing is padded: if the ranks do not divide
a length, their shares differ by a token or two, so no padding is counted in the loss or routed to an expert.

The loss is (sum, count) over a rank's own tokens: sums, counts and gradients are added over the ranks.

Read sequences.py (which rank owns what) and tiles.py (the arithmetic), then ring_attention.py and all_to_all_attention.py; apply.py
cuts the rows of a model.
"""

from rankloom.parallel.context.apply import context_parallel as context_parallel
from rankloom.parallel.context.apply import own_tokens as own_tokens
