"""`import sparsam` where torch comes without torch.distributed."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys

class Without:
    # torch says that it has torch.distributed by these functions
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            import torch._C
            for one in ("_c10d_init", "_rpc_init", "_dist_autograd_init"):
                if hasattr(torch._C, one):
                    delattr(torch._C, one)

sys.meta_path.insert(0, Without())
import torch.distributed
assert not torch.distributed.is_available()
import sparsam as sp

model = torch.nn.Linear(4, 4)
sp.sparsify(model, sp.Unstructured(), 0.5)
session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [sp.SparseTraining(sp.static())], clip=1.0)
session.backward(model(torch.ones(2, 4)).sum())
assert session.step()
"""


def test_without_torch_distributed():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
