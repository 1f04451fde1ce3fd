"""REINFORCE with a baseline on a batch of small grid worlds; the actor is wrapped in DDP."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class GridWorlds:
    """`n` agents on a torus; the reward is for coming nearer to the goal."""

    def __init__(self, n, size, generator):
        self.n, self.size, self.g = n, size, generator
        self.moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0], [0, 0]])

    def reset(self):
        self.agent = torch.randint(self.size, (self.n, 2), generator=self.g)
        self.goal = torch.randint(self.size, (self.n, 2), generator=self.g)
        return self.observe()

    def observe(self):
        board = torch.zeros(self.n, 2, self.size, self.size)
        rows = torch.arange(self.n)
        board[rows, 0, self.agent[:, 0], self.agent[:, 1]] = 1
        board[rows, 1, self.goal[:, 0], self.goal[:, 1]] = 1
        return board

    def distance(self):
        d = (self.agent - self.goal).abs()
        return torch.minimum(d, self.size - d).sum(1).float()

    def step(self, action):
        before = self.distance()
        self.agent = (self.agent + self.moves[action]) % self.size
        return self.observe(), before - self.distance()


class ActorCritic(nn.Module):
    def __init__(self, size, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(2 * size * size, hidden), nn.Tanh(),
                                  nn.Linear(hidden, hidden), nn.Tanh())
        self.policy, self.value = nn.Linear(hidden, 5), nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.body(x)
        return self.policy(h), self.value(h).squeeze(-1)


class Agent:
    def __init__(self, net, gamma, generator):
        self.net = DDP(net)
        self.core = self.net.module
        self.gamma, self.g = gamma, generator

    @torch.no_grad()
    def act(self, obs):
        probs = self.core(obs)[0].softmax(-1)
        return torch.multinomial(probs, 1, generator=self.g).squeeze(1)

    def rollout(self, env, length):
        obs, record = env.reset(), []
        for _ in range(length):
            action = self.act(obs)
            following, reward = env.step(action)
            record.append((obs, action, reward))
            obs = following
        ret, returns = torch.zeros(env.n), []
        for _, _, reward in reversed(record):
            ret = reward + self.gamma * ret
            returns.insert(0, ret)
        o, a, r = zip(*record)
        return torch.cat(o), torch.cat(a), torch.cat(returns), torch.stack(r).sum(0).mean()

    def loss(self, obs, action, returns, entropy):
        logits, value = self.core(obs)
        advantage = (returns - value.detach())
        logp = F.log_softmax(logits, -1)
        chosen = logp.gather(1, action[:, None]).squeeze(1)
        bonus = -(logp.exp() * logp).sum(-1).mean()
        return -(chosen * advantage).mean() + 0.5 * F.mse_loss(value, returns) - entropy * bonus


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--updates", type=int, default=40)
    p.add_argument("--envs", type=int, default=48)
    p.add_argument("--length", type=int, default=12)
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--lr", type=float, default=1e-3)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(100 + dist.get_rank())
    agent = Agent(ActorCritic(8, args.hidden), 0.9, g)
    optimizer = torch.optim.Adam(agent.net.parameters(), lr=args.lr)
    env = GridWorlds(args.envs, 8, g)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for _ in range(args.updates):
            obs, action, returns, reward = agent.rollout(env, args.length)
            optimizer.zero_grad()
            agent.loss(obs, action, returns, entropy=0.01).backward()
            optimizer.step()
            total += reward
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: reward {total.item() / args.updates / dist.get_world_size():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
