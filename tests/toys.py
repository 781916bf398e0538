"Models of tests."

from torch import nn


class Of(nn.Module):
    "What a function does with parts: `Of(lambda own, x: own.a(x), a=…)`."

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return self.run(self, x)
