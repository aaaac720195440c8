{{/* Pod template of a server, or of its ranks. Takes a dict of `root`, `role` and, for a
StatefulSet of ranks, `server` (the number of the server). */}}
{{- define "tandem.serverPod" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $values := get $root.Values $role }}
{{- $name := printf "%s-%s" $root.Release.Name $role }}
{{- $service := printf "tandem.%s.v1.%sService" $role (title $role) }}
{{- $command := list (printf "tandem-%s-server" $role) "--config" "/etc/tandem/config/config.yaml" }}
{{- $pods := include "tandem.podsOfServer" $values | int }}
{{- $ranked := gt $pods 1 }}
{{- $lws := and $ranked (eq $root.Values.ranks.mode "leaderWorkerSet") }}
{{- $local := gt (int $values.ranksPerPod) 1 }}
{{- $index := printf "metadata.labels['%s']" (ternary "leaderworkerset.sigs.k8s.io/worker-index" "apps.kubernetes.io/pod-index" $lws) }}
{{- $master := "127.0.0.1" }}
{{- if $lws }}
{{- /* The controller puts LWS_LEADER_ADDRESS in front of the variables. */}}
{{- $master = "$(LWS_LEADER_ADDRESS)" }}
{{- else if $ranked }}
{{- $master = printf "%s-%d-0.%s.%s.svc" $name (int .server) $name $root.Release.Namespace }}
{{- end }}
metadata:
  labels:
    {{- include "tandem.selector" (dict "root" $root "component" $role) | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if hasKey . "server" }}
    server: {{ .server | quote }}
    {{- end }}
  annotations:
    # A change of the configuration restarts the pods.
    checksum/config: {{ include "tandem.config" . | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "tandem.podSecurity" $root | nindent 2 }}
  {{- include "tandem.placement" $values | nindent 2 }}
  terminationGracePeriodSeconds: {{ add $values.drainSeconds $values.graceSeconds }}
  {{- include "tandem.waitForModels" (dict "root" $root "image" $values.image) | nindent 2 }}
  containers:
    - name: server
      image: {{ include "tandem.image" (dict "root" $root "name" $values.image) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- if $local }}
      # The ranks of a pod are processes of one container, which see all of its GPUs.
      command: {{ concat (list "/etc/tandem/config/ranks.sh" ($values.ranksPerPod | toString) ($values.ranks | toString) $master "29500") $command | toJson }}
      {{- else }}
      command: {{ toJson $command }}
      {{- end }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: TANDEM__SERVER__ADVERTISED_ADDRESS
          value: $(POD_NAME).{{ $name }}.{{ $root.Release.Namespace }}.svc:{{ include "tandem.port" (dict "role" $role "kind" "grpc") }}
        - {name: TMPDIR, value: /scratch}
        {{- if $local }}
        - name: POD_INDEX
          {{- if $ranked }}
          valueFrom: {fieldRef: {fieldPath: "{{ $index }}"}}
          {{- else }}
          value: "0"
          {{- end }}
        {{- else if $ranked }}
        - name: RANK
          valueFrom: {fieldRef: {fieldPath: "{{ $index }}"}}
        - {name: WORLD_SIZE, value: {{ $values.ranks | quote }}}
        - {name: LOCAL_RANK, value: "0"}
        - {name: LOCAL_WORLD_SIZE, value: "1"}
        - name: MASTER_ADDR
          value: {{ $master }}
        - {name: MASTER_PORT, value: "29500"}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: grpc, containerPort: {{ include "tandem.port" (dict "role" $role "kind" "grpc") }}}
        - {name: metrics, containerPort: {{ include "tandem.port" (dict "role" $role "kind" "metrics") }}}
      {{- /* The probes of the kubelet speak no TLS: with TLS the binary asks its own server. */}}
      {{- $ask := dict "grpc" (dict "port" (include "tandem.port" (dict "role" $role "kind" "grpc") | int) "service" $service) }}
      {{- if include "tandem.tls" $root }}
      {{- $ask = dict "exec" (dict "command" (append $command "--check-health")) }}
      {{- end }}
      {{- /* Liveness is not readiness: a server that saves to a slow disk must not be killed. */}}
      {{- $alive := dict "grpc" (dict "port" (include "tandem.port" (dict "role" $role "kind" "grpc") | int) "service" "liveness") }}
      {{- if include "tandem.tls" $root }}
      {{- $alive = dict "exec" (dict "command" (append $command "--check-liveness")) }}
      {{- end }}
      startupProbe:
        {{- toYaml $ask | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: {{ max 1 (div (add $values.startSeconds 9) 10) }}
      readinessProbe:
        {{- toYaml $ask | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 1
      livenessProbe:
        {{- toYaml $alive | nindent 8 }}
        periodSeconds: 30
        timeoutSeconds: 10
        failureThreshold: 4
      {{- with $values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "tandem.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/tandem/config, readOnly: true}
        - {name: models, mountPath: /models, readOnly: true}
        {{- if ne $role "rollout" }}
        - {name: runs, mountPath: /runs}
        {{- end }}
        - {name: scratch, mountPath: /scratch}
        {{- if $local }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if include "tandem.tls" $root }}
        - {name: tls, mountPath: /etc/tandem/tls, readOnly: true}
        {{- end }}
        {{- if $root.Values.tokens.secretName }}
        - {name: tokens, mountPath: /etc/tandem/tokens, readOnly: true}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ $name }}{{ if $local }}, defaultMode: 0555{{ end }}}
    - name: models
      persistentVolumeClaim: {claimName: {{ include "tandem.claim" (dict "root" $root "volume" "models") }}}
    {{- if ne $role "rollout" }}
    - name: runs
      persistentVolumeClaim: {claimName: {{ include "tandem.claim" (dict "root" $root "volume" "runs") }}}
    {{- end }}
    - name: scratch
      emptyDir: {sizeLimit: {{ $values.scratchSize }}}
    {{- if $local }}
    # NCCL exchanges through it; a container's own has 64 MiB.
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $root.Values.ranks.shmSize }}}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if include "tandem.tls" $root }}
    - name: tls
      secret: {secretName: {{ include "tandem.tlsSecret" $root }}, defaultMode: 0440}
    {{- end }}
    {{- with $root.Values.tokens.secretName }}
    - name: tokens
      secret:
        secretName: {{ . }}
        defaultMode: 0440
        items:
          - {key: reader, path: reader}
          - {key: user, path: user}
          - {key: admin, path: admin}
    {{- end }}
{{- end }}

{{/* All objects of the servers of a role. Takes a dict of `root` and `role`. */}}
{{- define "tandem.servers" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $values := get $root.Values $role }}
{{- $name := printf "%s-%s" $root.Release.Name $role }}
{{- $replicas := $values.replicas | default 1 | int }}
{{- $of := dict "root" $root "component" $role }}
{{- $labels := include "tandem.labels" $of }}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}
  labels:
    {{- $labels | nindent 4 }}
data:
  config.yaml: |
    {{- include "tandem.config" . | nindent 4 }}
  {{- if gt (int $values.ranksPerPod) 1 }}
  ranks.sh: {{ $root.Files.Get "files/ranks.sh" | toJson }}
  {{- end }}
---
# Names of the pods. Ranks and clients look for each other before they serve.
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels:
    {{- $labels | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "tandem.selector" $of | nindent 4 }}
  ports:
    - {name: grpc, port: {{ include "tandem.port" (dict "role" $role "kind" "grpc") }}, targetPort: grpc}
    - {name: metrics, port: {{ include "tandem.port" (dict "role" $role "kind" "metrics") }}, targetPort: metrics}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels:
    {{- $labels | nindent 4 }}
spec:
  maxUnavailable: {{ $values.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "tandem.selector" $of | nindent 6 }}
{{- $pods := include "tandem.podsOfServer" $values | int }}
{{- if eq $pods 1 }}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels:
    {{- $labels | nindent 4 }}
spec:
  serviceName: {{ $name }}
  replicas: {{ $replicas }}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "tandem.selector" $of | nindent 6 }}
  template:
    {{- include "tandem.serverPod" . | nindent 4 }}
{{- else if eq $root.Values.ranks.mode "leaderWorkerSet" }}
---
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ $name }}
  labels:
    {{- $labels | nindent 4 }}
spec:
  replicas: {{ $replicas }}
  networkConfig: {subdomainPolicy: Shared}
  leaderWorkerTemplate:
    size: {{ $pods }}
    # A server does not replace a lost rank: all of its ranks start again.
    restartPolicy: RecreateGroupOnPodRestart
    workerTemplate:
      {{- include "tandem.serverPod" . | nindent 6 }}
{{- else }}
{{- range $server := until $replicas }}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}-{{ $server }}
  labels:
    {{- $labels | nindent 4 }}
spec:
  serviceName: {{ $name }}
  replicas: {{ $pods }}
  # No rank serves before all are there.
  podManagementPolicy: Parallel
  # Ranks of two configurations do not start together, so a rolling update would never end.
  updateStrategy: {type: OnDelete}
  selector:
    matchLabels:
      {{- include "tandem.selector" $of | nindent 6 }}
      server: {{ $server | quote }}
  template:
    {{- include "tandem.serverPod" (dict "root" $root "role" $role "server" $server) | nindent 4 }}
{{- end }}
{{- end }}
{{- end }}
