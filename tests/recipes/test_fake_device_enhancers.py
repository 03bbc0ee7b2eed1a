"""The losses of both enhancers, forward and backward, on a device that is not there: nothing is left on the CPU, the
host never waits, and few kernels are launched. Launches do not depend on the width of a network."""

import pytest

from helpers import cmgan_support, diffusion_buffer_support, fake_device


def count(model, batch, loss) -> fake_device.Counts:
    return fake_device.run(loss, model, batch)


def test_cmgan_generator():
    counts = count(*cmgan_support.generator_step(gradient_checkpointing=False))
    assert not counts.syncs and 1000 < counts.launches <= 1500


@pytest.mark.long
def test_cmgan_generator_with_gradient_checkpointing():
    counts = count(*cmgan_support.generator_step(seconds=0.5))
    assert not counts.syncs


def test_cmgan_discriminator():
    counts = count(*cmgan_support.discriminator_step())
    assert not counts.syncs and 300 < counts.launches <= 700


@pytest.mark.parametrize(
    "network, launches, flags",
    [
        ("ncsnpp", 1050, {}),
        pytest.param("block_causal", 1700, {}, marks=pytest.mark.long),
        ("ncsnpp", 1050, {"loss": "dsm"}),
        ("ncsnpp", 1050, {"level": "track"}),
    ],
)
def test_diffusion_buffer(network, launches, flags):
    counts = count(*diffusion_buffer_support.training_step(network, **flags))
    assert not counts.syncs and launches / 2 < counts.launches <= launches
