"""What every device must do, asked of a real GPU."""

from tests.device.test_contract import *  # noqa: F403  each test, with this folder's devices
