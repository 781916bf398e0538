"""Other people's packages for the tests that compare with them: skipped where a
package is missing, never where it is broken.
"""

import importlib
import importlib.util

import pytest
import torch

from normalnorm.experiments.networks import efficient

DECLARED, import_torchvision = efficient._DECLARED, efficient._torchvision
TORCH = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
# whether PyTorch computes by AVX2 or more
VECTORS = torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX")
FOLLOWS = pytest.mark.skipif(
    TORCH < (2, 13),
    reason="the compiler of this torch cannot follow these "
    "functions; tried with 2.13 and 2.15",
)


def installed(name: str):
    """The module `name`, or a skipped test where its package is not installed.

    A package that is there and cannot be imported fails the test.
    """
    package = name.split(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if (
        package
        in ("peft", "pytorch_lightning", "timm", "torchvision", "transformers")
        and importlib.util.find_spec("torchvision") is not None
    ):
        import_torchvision()  # the others import it, too
    return importlib.import_module(name)


def onnx_of(model, u):
    """A function of inputs like `u`, by onnxruntime.

    Tried with onnx 1.23, onnxscript 0.7, onnxruntime 1.31.
    """
    for package in ("onnx", "onnxscript"):
        installed(package)
    runtime = installed("onnxruntime")
    try:
        program = torch.onnx.export(model, (u,), dynamo=True, verbose=False)
    except Exception as error:
        if "prims.signbit" in str(error):
            pytest.xfail("chapter 210: copysign has no translation")
        raise
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    name = session.get_inputs()[0].name
    return lambda u: torch.from_numpy(session.run(None, {name: u.numpy()})[0])
