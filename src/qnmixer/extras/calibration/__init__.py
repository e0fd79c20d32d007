"""The dose of a measurement, as the counts I₀ and the electronic σ of `noise=physical`."""
