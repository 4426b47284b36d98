"""Where a warning begins, and where an error.

Calibrated on freshly built models that are known to train, which should get no warning in their published
initialization, and on broken ones, which must get an error: tests/inspection/findings/test_thresholds.py holds small
ones of both kinds, docs/inspector.md what comes out on public models.
"""

GROWN = 10.0, 1e3  # std over the input's: a residual stream of 36 blocks has 6; 1000 is near float16's end
SHRUNK = 30.0, 1e4  # timm's VGG-11 ends at 22; AlexNet, in PyTorch's own initialization, at 320 and trains
CONSTANT = 100.0, 1e4  # mean square over variance: AlexNet ends at 114; 10^4 is lost in the 8 bits of bfloat16
GRADIENT = 1e3, 1e4  # first over last layer: ResNet-50 has 450 in training mode; across 10^4 no learning rate serves
SATURATED = 0.1, 0.5  # share of units: a gate may hold some of them on purpose, but not half a layer
DEAD = 0.5, 0.6  # share of units
ALWAYS_ON = 0.5  # share of units: the rectifier is none for them, which costs but does not break, so never an error
STANDARD_ERRORS = 2.5  # more dead than always on: SqueezeNet has 52 % and 31 % of 48 units as published, and trains
RANKS, RANK = 4, (3.0, 2.0)  # ranks a weight could have at least, over the effective one at least, which is below 2
BRANCH = 30.0, 1e3  # std of what is added to a residual stream over that of the stream
DISAGREEMENT = 1.5, 2.0  # computed std over the measured one, or its inverse: a note, and a warning
DEPENDENT = 1.5  # std on a few random inputs over the computed one, or its inverse
PREDICTION = 5.0  # by how much predictions may be larger than other values: logits of trained classifiers have 20
