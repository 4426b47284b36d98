"""The core needs torch and nothing else, numpy not excepted."""

import subprocess
import sys
from pathlib import Path

import pytest

MISSING = ("numpy", "scipy", "matplotlib", "rich", "jinja2", "typer", "sklearn", "triton")
WORK = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))  # an import of these fails

import copy, pickle, warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's own
import torch
from torch import nn
import varprop as vp

x = torch.rand(64, 3, 8, 8)
moments = vp.input_moments(x)
plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, 2))
print(vp.propagate(plain, moments).table())
print(vp.summary(plain, (3, 8, 8)))
print(vp.inspect(plain, moments, check=x).text())
vp.init_(plain, moments)
model = vp.normalize(plain, moments, form="deep")
model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
optimizer = torch.optim.SGD(vp.param_groups(model, 1e-4), lr=0.1)
model(x).square().mean().backward()
optimizer.step()
assert torch.allclose(vp.fold(model)(x), model(x), atol=1e-5)
compiled = torch.compile(model, backend="aot_eager")
assert torch.allclose(compiled(x), model(x), atol=1e-5)
for to in ("weight", "batch", "analytic", "standard"):
    vp.reparametrize(plain, to, moments=moments, batch=x, example=x)
assert sys.modules["numpy"] is None
"""


@pytest.mark.slow
def test_everything_but_the_search_for_a_rate_runs_on_torch_alone():
    paths = str(Path(__file__).parents[1] / "src")
    done = subprocess.run(
        [sys.executable, "-c", WORK], env={"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
