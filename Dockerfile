# The repository with its environment, for a machine with Docker and nothing else.
#   docker build --build-arg TORCH=cu126 -t qnmixer .     # TORCH: cu130 (Turing and newer), cu126 (V100, Pascal), cpu
#   docker run --gpus all --shm-size=8g --user "$(id -u):$(id -g)" -e USER -e HOME=/qnmixer/runs/.home \
#     -v "$PWD/runs:/qnmixer/runs" qnmixer python -m qnmixer.train experiment=demo
FROM python:3.12-bookworm AS base

FROM base
ARG TORCH=cu130
WORKDIR /qnmixer
COPY . .
RUN make install TORCH=$TORCH
ENV PATH=/qnmixer/.venv/bin:$PATH
CMD ["python", "-m", "qnmixer.doctor"]
