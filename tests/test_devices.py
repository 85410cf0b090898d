"""Devices by the names that people, clouds and drivers have for them."""

from __future__ import annotations

import pytest

from advisor.models.devices import DEVICES, Device
from advisor.profiler.errors import PlanError


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("a100-80gb", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("A100", "a100-40gb"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100 PCIe", "h100-pcie"),
        ("NVIDIA L4", "l4"),
        ("AMD Instinct MI300X", "mi300x"),
        ("RTX PRO 6000 Blackwell Max-Q", "rtx-pro-6000"),
        ("cpu", "cpu"),
    ],
)
def test_a_device_is_found_by_its_names(name: str, known: str) -> None:
    assert Device.from_name(name).name == known


@pytest.mark.parametrize("name", ["", "a1000", "quantum", "a100-800gb", "?"])
def test_an_unknown_device_is_one_sentence(name: str) -> None:
    with pytest.raises(PlanError, match="is unknown") as raised:
        Device.from_name(name)
    assert "known are v100, t4" in str(raised.value)


def test_a_likely_slip_is_named() -> None:
    with pytest.raises(PlanError, match="did you mean a100-40gb or a100-80gb"):
        Device.from_name("a100-800gb")


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_figures_are_of_one_scale(device: Device) -> None:
    assert 1e11 < device.float32_flops < 1e15
    assert 1e10 < device.bandwidth_bytes_per_s < 1e13
    assert device.flops("amp-bf16") >= device.flops("fp32")
    assert device.flops("tf32") >= device.flops("fp32")
    assert device.source
