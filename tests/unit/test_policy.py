"""Tests the limits of `TransferPolicy`: window and prefetch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fgoffload.errors import ConfigError
from fgoffload.transfer_schedule import TransferPolicy

pytestmark = pytest.mark.quick

SIZES = st.integers(0, 2**50)


@given(window_bytes=SIZES)
def test_compute_waits_above_the_window(window_bytes):
    policy = TransferPolicy(window_bytes=window_bytes)
    assert not policy.must_wait(in_flight_bytes=window_bytes)
    assert policy.must_wait(in_flight_bytes=window_bytes + 1)


@given(prefetch_bytes=SIZES, ahead_bytes=st.integers(1, 2**50))
def test_a_group_is_prefetched_if_it_fits_into_the_rest_of_the_prefetch(prefetch_bytes, ahead_bytes):
    policy = TransferPolicy(prefetch_bytes=prefetch_bytes)
    rest_bytes = prefetch_bytes - ahead_bytes
    assert policy.may_prefetch(ahead_bytes=ahead_bytes, group_bytes=rest_bytes)
    assert not policy.may_prefetch(ahead_bytes=ahead_bytes, group_bytes=rest_bytes + 1)


@given(prefetch_bytes=st.integers(1, 2**50), group_bytes=SIZES)
def test_the_first_group_is_prefetched_whatever_its_size(prefetch_bytes, group_bytes):
    assert TransferPolicy(prefetch_bytes=prefetch_bytes).may_prefetch(ahead_bytes=0, group_bytes=group_bytes)


@pytest.mark.parametrize(("field", "flag"), [("window_bytes", "--offload-window"), ("prefetch_bytes", "--offload-prefetch")])
def test_a_negative_size_is_rejected_with_its_flag(field, flag):
    with pytest.raises(ConfigError) as caught:
        TransferPolicy(**{field: -1})
    assert str(caught.value) == f"{flag} -1 is below 0 bytes. Use 0 or a size, for example 512MiB."
