"""A capture leaves other threads alone."""

import threading

import torch
from torch import nn

import varprop as vp


class TrainsElsewhere(nn.Module):
    """While it is captured, another thread trains a batch norm."""

    def __init__(self, other):
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(3), other

    def forward(self, x):
        thread = threading.Thread(target=lambda: self.other[0](torch.ones(4, 3)))
        thread.start()
        thread.join()
        return self.norm(x)


def test_a_batch_norm_that_another_thread_trains_keeps_its_statistics_current():
    other = nn.BatchNorm1d(3)
    vp.capture(TrainsElsewhere((other,)), torch.zeros(1, 3))
    assert int(other.num_batches_tracked) > 0
    torch.testing.assert_close(other.running_mean, torch.full((3,), 1 - 0.9 ** int(other.num_batches_tracked)))
