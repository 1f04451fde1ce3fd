"""PPO on drones in wind, one wind field for each process; gradients travel in buckets of one size."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Normal

torch.set_num_threads(1)

ENVS, HORIZON, OBS, ACT = 32, 24, 6, 2
BUCKET = 8192
KL_LIMIT, CLIP, GAMMA = 0.0125, 0.2, 0.97


class Drones:
    """Points in the plane that should stay near the origin."""

    def __init__(self, field, seed):
        self.field = field
        self.rng = torch.Generator().manual_seed(seed)
        self.clock = 0
        self.wind = torch.zeros(ENVS, 2)
        self.reset()

    def reset(self):
        self.position = torch.randn(ENVS, 2, generator=self.rng)
        self.velocity = torch.zeros(ENVS, 2)
        return self.observe()

    def observe(self):
        return torch.cat([self.position, self.velocity, self.wind], dim=1)

    def step(self, action):
        self.clock += 1
        gust = 25.0 if self.field == "ridge" and self.clock > 15 * HORIZON else 0.5
        self.wind = 0.9 * self.wind + 0.1 * gust * torch.randn(ENVS, 2, generator=self.rng)
        self.velocity = 0.9 * self.velocity + 0.1 * (action.clamp(-2, 2) + self.wind)
        self.position = self.position + 0.1 * self.velocity
        return self.observe(), -self.position.norm(dim=1) - 0.01 * action.square().sum(1)


def mlp(out):
    return nn.Sequential(nn.Linear(OBS, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out))


class Bucket:
    """One buffer for everything that is averaged, whatever its size."""

    def __init__(self):
        self.buffer = torch.zeros(BUCKET)

    def average(self, tensors):
        flat = torch.cat([t.reshape(-1) for t in tensors])
        self.buffer[: flat.numel()] = flat
        dist.all_reduce(self.buffer)
        self.buffer /= dist.get_world_size()
        for t, piece in zip(tensors, self.buffer.split([t.numel() for t in tensors] + [BUCKET - flat.numel()])):
            t.copy_(piece.view_as(t))


@torch.no_grad()
def rollout(env, actor, critic, log_std):
    obs, store = env.reset(), []
    for _ in range(HORIZON):
        policy = Normal(actor(obs), log_std.exp())
        action = policy.sample()
        following, reward = env.step(action)
        store.append((obs, action, policy.log_prob(action).sum(1), reward))
        obs = following
    value, returns = critic(obs).squeeze(1), []
    for *_, reward in reversed(store):
        value = reward + GAMMA * value
        returns.insert(0, value)
    obs, action, logp, reward = (torch.cat(column) for column in zip(*store))
    return obs, action, logp, torch.cat(returns), reward.mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    actor, critic, log_std = mlp(ACT), mlp(1), nn.Parameter(torch.full((ACT,), math.log(0.5)))
    torch.manual_seed(100 + rank)
    env = Drones(["valley", "ridge", "coast"][rank], seed=rank)
    policy_parameters = [*actor.parameters(), log_std]
    actor_opt = torch.optim.Adam(policy_parameters, lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=2e-3)
    bucket = Bucket()

    for iteration in range(150):
        obs, action, old_logp, returns, reward = rollout(env, actor, critic, log_std)
        advantage = returns - critic(obs).detach().squeeze(1)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        for part in torch.randperm(len(obs)).chunk(4):
            logp = Normal(actor(obs[part]), log_std.exp()).log_prob(action[part]).sum(1)
            ratio = (logp - old_logp[part]).exp()
            if (ratio - 1 - ratio.log()).mean() > KL_LIMIT:
                break
            surrogate = torch.min(ratio * advantage[part], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[part])
            actor_opt.zero_grad()
            (-surrogate.mean()).backward()
            bucket.average([p.grad for p in policy_parameters])
            actor_opt.step()
        for part in torch.randperm(len(obs)).chunk(4):
            critic_opt.zero_grad()
            nn.functional.smooth_l1_loss(critic(obs[part]).squeeze(1), returns[part]).backward()
            bucket.average([p.grad for p in critic.parameters()])
            critic_opt.step()
        if iteration % 25 == 24:
            mean = reward.reshape(1).clone()
            bucket.average([mean])
            if rank == 0:
                print(f"iteration {iteration + 1}: reward {mean.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
