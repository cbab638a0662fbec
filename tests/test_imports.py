"""What is imported when: GPU machines often have little installed, and --help should not take seconds."""

import subprocess
import sys

import pytest

EDGES = {"pydantic", "cyclopts", "rich", "yaml", "plotly", "syrupy"}
HEAVY = {"torch", "transformers", "networkx"}


def imported_by(code):
    """Return the top-level packages that a fresh interpreter has imported after running some code."""
    script = f"import sys\n{code}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


def test_import_memopt_is_light():
    assert not imported_by("import memopt") & (EDGES | HEAVY)


def test_config_passes_and_ir_need_none_of_the_edges():
    code = (
        "from memopt.config import Config, passes_for\n"
        "from memopt.passes import Pipeline, make_pass\n"
        "import memopt.ir\n"
        "passes = [make_pass(name) for name in passes_for(Config(activation_swap='attention'))]"
    )
    assert not imported_by(code) & (EDGES | {"torch", "transformers"})


@pytest.mark.parametrize("module", ["memopt.cli.analyze", "memopt.cli.apply"])
def test_help_needs_neither_torch_nor_transformers(module):
    assert not imported_by(f"import {module}") & {"torch", "transformers"}


def test_analyze_plan_and_apply_need_none_of_the_edges():
    """Transformers itself needs yaml, and may import rich."""
    blocked = "\n".join(f"sys.modules['{name}'] = None" for name in sorted(EDGES - {"rich", "yaml"}))
    code = f"""
{blocked}
import torch, memopt
class Attention(torch.nn.Linear): pass
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(512, 512)
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict(dict(self_attn=Attention(512, 512))) for _ in range(2))
    def forward(self, x):
        x = self.inner(x)
        for layer in self.layers:
            x = layer["self_attn"](x)
        return x.sum()
model, x = Model(), torch.randn(1024, 512)
handle = memopt.apply(model, memopt.plan(memopt.analyze(model, (x,)), activation_swap="attention"))
model(x).backward()
assert handle.stats().copied_out_bytes
handle.undo()
"""
    imported_by(code)
