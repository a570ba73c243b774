"""PPO in the manner of CleanRL and Spinning Up, with a stop by the divergence after the backward pass."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from tests.scripts.networks import perceptron

ROLLOUT, MINIBATCH, EPOCHS, UPDATES = 24, 8, 4, 6
LR, CLIP, RATIO, TARGET_KL = 2e-2, 0.5, 0.2, 0.02


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = perceptron(5, 16, 16, 3), perceptron(5, 16, 16, 1)

    def forward(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        policy = Categorical(logits=self.actor(states))
        return policy.log_prob(actions), policy.entropy(), self.critic(states).flatten()


@torch.no_grad()
def play(agent: Agent) -> tuple[Tensor, ...]:
    states = torch.randn(ROLLOUT, 5)
    actions = Categorical(logits=agent.actor(states)).sample()
    returns = states.gather(1, actions[:, None]).flatten()
    log_probs, _, values = agent(states, actions)
    return states, actions, log_probs, returns, returns - values


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    torch.manual_seed(0)
    agent = Agent()
    ddp = DistributedDataParallel(agent, bucket_cap_mb=0.001)
    optimizer = Adam(ddp.parameters(), lr=LR, eps=1e-5)
    first = 0
    if resume:
        checkpoint = torch.load(folder / "agent.pt", map_location="cpu")
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["update"]
    torch.manual_seed(100 * dist.get_rank() + first)
    for update in range(first, steps):
        optimizer.param_groups[0]["lr"] = LR * (1 - update / UPDATES)
        rollout = play(agent)
        stops = False
        for _ in range(EPOCHS):
            for chosen in torch.randperm(ROLLOUT).split(MINIBATCH):
                states, actions, old_log_probs, returns, advantages = (one[chosen] for one in rollout)
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                log_probs, entropy, values = ddp(states, actions)
                change = log_probs - old_log_probs
                ratio = change.exp()
                policy_loss = -torch.min(ratio * advantages, ratio.clamp(1 - RATIO, 1 + RATIO) * advantages).mean()
                loss = policy_loss + 0.5 * (values - returns).square().mean() - 0.01 * entropy.mean()
                loss.backward()
                log(loss.item())
                if mean_over_ranks((ratio - 1 - change).detach().mean()) > TARGET_KL:
                    optimizer.zero_grad()
                    stops = True
                    break
                nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            log(float(stops))
            if stops:
                break
        if dist.get_rank() == 0:
            saved = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "update": update + 1}
            torch.save(saved, folder / "agent.pt")
    return [agent]
