"""What the spectral entropy of pure noise looks like: the null every routing signal is compared with."""

import math


def white_noise_entropy(width: int) -> tuple[float, float]:
    """Mean and standard deviation of H for a white Gaussian vector. Its normalised energies are Dirichlet(½, …, ½), of
    known moments: the mean is ψ(D/2 + 1) − ψ(3/2); the second is a sum over pairs of bins and over single bins."""
    total = width / 2
    (first, _), (second, spread), (third, slope) = polygammas(1.5), polygammas(2.5), polygammas(total + 2)
    mean = polygammas(total + 1)[0] - first
    pair = (first - third) ** 2 - slope
    single = (second - third) ** 2 + spread - slope
    second_moment = width * (0.25 * (width - 1) * pair + 0.75 * single) / (total * (total + 1))
    deviation = math.sqrt(max(second_moment - mean**2, 0.0))
    return mean / math.log(width), deviation / math.log(width)


def polygammas(x: float) -> tuple[float, float]:
    """ψ(x) and ψ′(x) for x > 0: recurrence up to 10, then the asymptotic series (errors below 1e-13)."""
    digamma = trigamma = 0.0
    while x < 10:
        digamma, trigamma, x = digamma - 1 / x, trigamma + 1 / (x * x), x + 1
    y = 1 / (x * x)
    digamma = digamma + math.log(x) - 0.5 / x - y * (1 / 12 - y * (1 / 120 - y * (1 / 252 - y * (1 / 240 - y / 132))))
    trigamma = trigamma + (1 + 0.5 / x + y * (1 / 6 - y * (1 / 30 - y * (1 / 42 - y * (1 / 30 - y * 5 / 66))))) / x
    return digamma, trigamma
