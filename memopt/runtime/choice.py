"""Which saved tensors of one region call are swapped."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

from memopt.errors import IllegalValueError
from memopt.ir import Action, CheckpointPolicy, Kind
from memopt.ir.offload import Offload
from memopt.operands import PLAIN
from memopt.runtime.marks import is_marked
from memopt.runtime.policy import KEPT_LOOKS, SWAPS, policy_of
from memopt.runtime.region import Region
from memopt.tensors import is_odd, kind_of, storage_keys


class Choice:
    """Ask the region's policy, but never swap a parameter, a buffer, a cast of a parameter, or what is elsewhere."""

    def __init__(self, region: Region, module: nn.Module, device: torch.device) -> None:
        self._policy = _large(region.offload or Offload()) if region.collects else policy_of(region.policy)
        self._keeps_all = region.action is Action.KEEP and region.offload is None
        self._keeps_looks = KEPT_LOOKS.get(region.policy) if isinstance(region.policy, str) else None
        self._module = module
        self._device = device

    def swaps(self, tensor: torch.Tensor) -> bool:
        """Decide on one saved tensor."""
        return self.passes(tensor) and self.is_activation(tensor)

    def stays_by_looks(self, tensor: torch.Tensor) -> bool:
        """Tell whether whatever looks like a tensor stays; a policy of the user's may say something else each time."""
        return self._keeps_all or (self._keeps_looks is not None and self._keeps_looks(tensor))

    def is_activation(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is no parameter, buffer, or cast of a parameter."""
        return kind_of(tensor, *self._storages) is Kind.ACTIVATION

    def passes(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor may be swapped and the policy is for it, be it a parameter or not."""
        if self._keeps_all or type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            return False
        if tensor.device != self._device or is_odd(tensor):
            return False
        if (answer := self._policy(tensor)) not in SWAPS:
            _check_answer(answer)
            return False
        return True

    @cached_property
    def _storages(self) -> tuple[frozenset[int], frozenset[int]]:
        """The storages of the parameters and buffers, taken in each call anew: FSDP2 unshards only now."""
        return storage_keys(self._module.parameters()), storage_keys(self._module.buffers())


def _large(offload: Offload) -> Callable[[torch.Tensor], CheckpointPolicy]:
    """Return the policy of parts: by size, whatever is marked left out."""

    def policy(tensor: torch.Tensor) -> CheckpointPolicy:
        moves = tensor.numel() >= offload.min_tensor_elements and not is_marked(tensor)
        return CheckpointPolicy.MUST_SWAP if moves else CheckpointPolicy.MUST_SAVE

    return policy


def _check_answer(answer: object) -> None:
    if not isinstance(answer, CheckpointPolicy | TorchPolicy):
        raise IllegalValueError("policy_fn's answer", answer, "a memopt.CheckpointPolicy")
