"""What functions of PyTorch, timm and Lightning do with our batch layers that
look for PyTorch's: the table of chapter 271.
"""

import copy

import pytest
import torch
from torch import nn

import normalnorm
from normalnorm import to_normality
from normalnorm.layers.running_averages import update_bn
from normalnorm.layers.sync import convert_sync
from normalnorm.theory.newton import newton_lambda
from tests.layers.steps import together
from tests.peers import FOLLOWS, installed
from tests.refusals import refusals

LAYERS = (
    "BatchNormalNorm1d",
    "SyncBatchNormalNorm",
    "BMLVNorm",
    "LMBVNorm",
    "BatchReNorm",
    "DecorrelatedBatchNorm1d",
    "DecorrelatedBatchNormalNorm1d",
)


def network() -> nn.Sequential:
    "In training, with running averages that are not those of a new layer."
    model = to_normality(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    )
    model(torch.randn(8, 3, 6, 6).exp())
    return model


def averages(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", LAYERS)
def test_pytorch_makes_new_averages(name):
    model = nn.Sequential(nn.Linear(5, 6), getattr(normalnorm, name)(6))
    data = [torch.randn(16, 5).exp() for _ in range(3)]
    model(data[0])  # something that has to be forgotten
    before, ours = averages(model), copy.deepcopy(model)
    torch.manual_seed(0)
    torch.optim.swa_utils.update_bn(data, model)
    torch.manual_seed(0)
    update_bn(data, ours)
    assert same(averages(model), averages(ours))
    assert not same(averages(model), before)


@pytest.mark.parametrize("training", [True, False])
def test_torch_func_takes_the_averages_away(training):
    "λ too: several batches at once are as one after the other."
    model, u = network().train(training), torch.randn(3, 8, 3, 6, 6).exp()
    model[1].noise = 0.0
    torch.func.replace_all_batch_norm_modules_(model)
    found = torch.func.vmap(model)(u)
    for batch, out in zip(u, found, strict=True):
        torch.testing.assert_close(out, model(batch))


def by_pytorch(model):
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def by_timm(model):
    return installed("timm.layers").convert_sync_batchnorm(model)


def by_lightning(model):
    plugins = installed("pytorch_lightning.plugins.layer_sync")
    return plugins.TorchSyncBatchNorm().apply(model)


@pytest.mark.parametrize("convert", [by_pytorch, by_timm, by_lightning])
def test_a_converted_layer_keeps_its_formula_and_its_state(convert):
    model = network()
    before, weight = averages(model), model[1].weight
    wanted = convert_sync(copy.deepcopy(model))
    model = convert(model)
    assert [type(m) for m in model] == [type(m) for m in wanted]
    assert type(model[1]) is normalnorm.SyncBatchNormalNorm
    assert same(averages(model), before) and model[1].weight is weight
    assert model[1].noise == 0.4 and model[1].training
    u = torch.randn(8, 3, 6, 6)
    for training in (True, False):
        found = []
        for m in (model, wanted):
            torch.manual_seed(0)
            found.append(m.train(training)(u))
        assert torch.equal(*found) and same(averages(model), averages(wanted))


def test_the_group_of_processes_arrives():
    group = object()
    layer = normalnorm.BatchNormalNorm1d(3)
    made = nn.SyncBatchNorm.convert_sync_batchnorm(layer, group)
    assert made.process_group is group and made.weight is layer.weight


def test_a_layer_with_an_activation_inside():
    model = to_normality(installed("timm").create_model("efficientnet_b0"))
    kinds = lambda model: [type(m).__name__ for m in model.modules()]
    wanted = convert_sync(copy.deepcopy(model))
    assert kinds(by_timm(model)) == kinds(wanted)


test_what_cannot_be_replaced_is_refused = refusals(
    [
        (normalnorm.DecorrelatedBatchNorm1d, "running_var"),
        (normalnorm.BatchReNorm, "running_var"),
        (normalnorm.BMLVNorm, "running_var"),
    ],
    lambda layer: by_pytorch(nn.Sequential(layer(4))),
    AttributeError,
)


def test_a_function_that_has_changed_is_refused():
    def convert_sync_batchnorm(module):
        return list(module.named_children())

    with pytest.raises(
        RuntimeError, match=r"normalnorm\.layers\.sync\.convert_sync"
    ):
        convert_sync_batchnorm(normalnorm.BatchNormalNorm1d(3))


def test_timm_freezes_and_unfreezes():
    utils, model = installed("timm.utils"), network()
    utils.freeze(model)
    before, u = averages(model), torch.randn(8, 3, 6, 6)
    assert torch.equal(model.train()(u), model(u))  # no noise
    assert same(averages(model), before)
    assert not any(p.requires_grad for p in model.parameters())
    utils.unfreeze(model)
    model.train()(u)
    assert not same(averages(model), before)


def in_one_of_two(rank: int) -> dict:
    "What timm does in one of two processes."
    torch.manual_seed(rank)
    utils, found = installed("timm.utils"), {}
    for reduce in (True, False):
        model = nn.Sequential(
            network(), normalnorm.DecorrelatedBatchNormalNorm2d(4)
        )
        model(torch.randn(8, 3, 6, 6).exp())
        before = averages(model)
        utils.distribute_bn(model, 2, reduce)
        found[reduce] = before, averages(model)
    return found


@pytest.mark.processes
def test_two_processes():
    "`distribute_bn` shares out every average, by mean or from the first."
    one, other = together(2, in_one_of_two)
    for reduce in (True, False):
        (first, after), (second, same_) = one[reduce], other[reduce]
        assert same(after, same_) and "1.running_covariance" in after
        for name, value in after.items():
            if "running" in name:
                assert not torch.equal(first[name], second[name])
                expected = first[name]
                if reduce:
                    expected = (first[name] + second[name]) / 2
                torch.testing.assert_close(value, expected)


@FOLLOWS
def test_a_compiled_function_may_look_at_a_models_tensors():
    "As models of transformers do, to learn their dtype; without a graph break."
    model, u = network().eval(), torch.randn(2, 3, 6, 6)

    def run(u):
        tensors = *model.parameters(), *model.buffers()
        return model(u) + sum(t.sum() for t in tensors)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(u), run(u))


def test_lightning_trains_frozen_layers_parameters():
    callbacks, model = installed("pytorch_lightning.callbacks"), network()
    callbacks.BaseFinetuning.freeze(model, train_bn=True)
    assert [
        name for name, p in model.named_parameters() if p.requires_grad
    ] == [
        "1.weight",
        "1.bias",
    ]
    callbacks.BaseFinetuning.freeze(model, train_bn=False)
    before = averages(model)
    model.train()(torch.randn(8, 3, 6, 6))
    assert same(averages(model), before)


@pytest.mark.slow
def test_lightning_averages_weights():
    "And makes running averages of them: the plain means over the batches."
    lightning = installed("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(5, 6), normalnorm.BatchNormalNorm1d(6, noise=0.0)
            )

        def training_step(self, batch, _):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module, seen = Module(), []
    layer = module.net[1]
    layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            lightning.callbacks.StochasticWeightAveraging(
                0.01, swa_epoch_start=1
            )
        ],
    ).fit(module, torch.utils.data.DataLoader(torch.randn(64, 5).exp(), 16))
    last = torch.stack(seen[-4:]).detach()
    for found, wanted in (
        (layer.running_mean, last.mean(1)),
        (layer.running_var, last.var(1)),
        (layer.running_lambda, newton_lambda(last, 1)),
    ):
        torch.testing.assert_close(found, wanted.mean(0).flatten())
    assert layer.momentum == 0.1 and layer.num_batches_tracked == 4
