# A stand-in of rabbitmq:4.0.5-management: the same RabbitMQ as Debian 13 packages it, with the plugins, the user's number,
# the volume and the entry of the image. RABBITMQ_DEFAULT_USER and RABBITMQ_DEFAULT_PASS are read by RabbitMQ itself.
FROM debian:trixie-slim
RUN groupadd --system --gid 999 rabbitmq \
    && useradd --system --uid 999 --gid rabbitmq --home-dir /var/lib/rabbitmq rabbitmq \
    && apt-get update \
    && apt-get install -y --no-install-recommends rabbitmq-server \
    && rm -rf /var/lib/apt/lists/* /var/lib/rabbitmq/* /var/lib/rabbitmq/.erlang.cookie \
    && echo '[rabbitmq_management,rabbitmq_prometheus].' >/etc/rabbitmq/enabled_plugins \
    && printf 'loopback_users.guest = false\nlog.console = true\n' >/etc/rabbitmq/rabbitmq.conf \
    && chown -R rabbitmq:rabbitmq /var/lib/rabbitmq /var/log/rabbitmq /etc/rabbitmq
# The wrappers in /usr/sbin change the user; the programs themselves do not.
ENV PATH=/usr/lib/rabbitmq/bin:$PATH HOME=/var/lib/rabbitmq RABBITMQ_LOGS=-
USER rabbitmq
VOLUME /var/lib/rabbitmq
EXPOSE 5672 15672 15692
CMD ["rabbitmq-server"]
