{{/* gRPC ports by role; the metrics port is the gRPC port + 2000. They are the servers' defaults. */}}
{{- define "tandem.ports" -}}
rollout: 7701
trainer: 7702
critic: 7703
{{- end }}

{{/* Port of a role. Takes a dict of `role` and `kind` (grpc or metrics). */}}
{{- define "tandem.port" -}}
{{- $grpc := get (include "tandem.ports" . | fromYaml) .role | int -}}
{{- if eq .kind "metrics" }}{{ add $grpc 2000 }}{{ else }}{{ $grpc }}{{ end -}}
{{- end }}

{{/* Labels that select the pods of a component. Takes a dict of `root` and `component`. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels of every object. Takes a dict of `root` and `component`. */}}
{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/*
Full name of an image. Takes a dict of `root` and `name`. A name with a tag or a digest is full
already; the colon of a registry's port is neither.
*/}}
{{- define "tandem.image" -}}
{{- $image := .root.Values.image -}}
{{- if or (contains "@" .name) (contains ":" (.name | splitList "/" | last)) }}{{ .name }}{{ else -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .name }}:{{ $image.tag | default .root.Chart.AppVersion -}}
{{- end -}}
{{- end }}

{{/* "true" if the servers use TLS. */}}
{{- define "tandem.tls" -}}
{{- if or .Values.tls.secretName .Values.tls.issuerRef }}true{{ end -}}
{{- end }}

{{/* Name of the Secret with the servers' certificate. */}}
{{- define "tandem.tlsSecret" -}}
{{ .Values.tls.secretName | default (printf "%s-tls" .Release.Name) }}
{{- end }}

{{/* Name of the Secret with the clients' certificate. */}}
{{- define "tandem.clientTlsSecret" -}}
{{ .Values.tls.clientSecretName | default (include "tandem.tlsSecret" .) }}
{{- end }}

{{/* Roles that this release has, as a YAML list. */}}
{{- define "tandem.roles" -}}
- rollout
- trainer
{{- if .Values.critic.enabled }}
- critic
{{- end }}
{{- end }}

{{/* Number of pods of a server. Takes the values of its role. */}}
{{- define "tandem.podsOfServer" -}}
{{ div (int .ranks) (int .ranksPerPod) }}
{{- end }}

{{/*
host:port of rank 0 of a server. Takes a dict of `root`, `role` and `index`. The pod of a
StatefulSet of ranks is SERVER-RANK, the leader of a LeaderWorkerSet has the name of the server.
*/}}
{{- define "tandem.address" -}}
{{- $values := get .root.Values .role -}}
{{- $server := printf "%s-%s-%d" .root.Release.Name .role (int .index) -}}
{{- $separate := and (gt (include "tandem.podsOfServer" $values | int) 1) (eq .root.Values.ranks.mode "statefulSet") -}}
{{- printf "%s.%s-%s.%s.svc:%s" (ternary (printf "%s-0" $server) $server $separate) .root.Release.Name .role .root.Release.Namespace (include "tandem.port" (dict "role" .role "kind" "grpc")) -}}
{{- end }}

{{/* What the chart adds to the configuration of a server. Takes a dict of `root` and `role`. */}}
{{- define "tandem.ownConfig" -}}
{{- $values := get .root.Values .role -}}
server:
  host: 0.0.0.0
  grpc_port: {{ include "tandem.port" (dict "role" .role "kind" "grpc") }}
  metrics_port: {{ include "tandem.port" (dict "role" .role "kind" "metrics") }}
  drain_seconds: {{ $values.drainSeconds }}
  path_roots: [/models{{ if ne .role "rollout" }}, /runs{{ end }}]
  {{- if gt (include "tandem.podsOfServer" $values | int) 1 }}
  private_network: true
  {{- end }}
  {{- if include "tandem.tls" .root }}
  tls:
    certificate_file: /etc/tandem/tls/tls.crt
    private_key_file: /etc/tandem/tls/tls.key
    ca_file: /etc/tandem/tls/ca.crt
  {{- else }}
  insecure: true
  {{- end }}
  {{- if .root.Values.tokens.secretName }}
  tokens:
    reader_file: /etc/tandem/tokens/reader
    user_file: /etc/tandem/tokens/user
    admin_file: /etc/tandem/tokens/admin
  {{- end }}
{{- if and (eq .role "trainer") .root.Values.critic.enabled }}
critic_address: {{ include "tandem.address" (dict "root" .root "role" "critic" "index" 0) }}
{{- end }}
{{- end }}

{{/* The whole configuration of a server. Takes a dict of `root` and `role`. */}}
{{- define "tandem.config" -}}
{{- $own := include "tandem.ownConfig" . | fromYaml -}}
{{- mustMergeOverwrite (deepCopy (get .root.Values .role).config) $own | toYaml -}}
{{- end }}

{{/* Security of every pod, as the restricted Pod Security Standard asks. */}}
{{- define "tandem.podSecurity" -}}
{{- $security := dict "runAsNonRoot" true "runAsUser" .Values.user "runAsGroup" .Values.user "fsGroup" .Values.user -}}
{{- $security = mustMerge $security (dict "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault")) -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
securityContext:
  {{- mustMergeOverwrite $security (deepCopy .Values.podSecurityContext) | toYaml | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Security of every container. */}}
{{- define "tandem.containerSecurity" -}}
{{- $security := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) -}}
{{- mustMergeOverwrite $security (deepCopy .Values.containerSecurityContext) | toYaml }}
{{- end }}

{{/* Where pods of a component may run. Takes the component's values. */}}
{{- define "tandem.placement" -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "runtimeClassName" "priorityClassName" }}
{{- with get $ $field }}
{{ dict $field . | toYaml }}
{{- end }}
{{- end }}
{{- end }}

{{/* Name of the file that the import Job leaves in the volume; empty without an import. */}}
{{- define "tandem.importMarker" -}}
{{- with .Values.models.import.steps }}/models/.imported-{{ toJson . | sha256sum | trunc 8 }}{{ end -}}
{{- end }}

{{/*
Init container that waits for the import Job. It gives up, so that an import that failed shows.
Takes a dict of `root` and `image`.
*/}}
{{- define "tandem.waitForModels" -}}
{{- $root := .root }}
{{- with include "tandem.importMarker" $root }}
initContainers:
  - name: wait-for-models
    image: {{ include "tandem.image" (dict "root" $root "name" $.image) }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command:
      - /bin/sh
      - -c
      - |
        end=$(($(date +%s) + {{ $root.Values.models.import.waitSeconds }}))
        until [ -e {{ . }} ]; do
          if [ "$(date +%s)" -ge "$end" ]; then
            echo "the models are not there after {{ $root.Values.models.import.waitSeconds }} s (models.import.waitSeconds): see the Job {{ $root.Release.Name }}-models-…" >&2
            exit 1
          fi
          sleep 2
        done
    securityContext:
      {{- include "tandem.containerSecurity" $root | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{/* Name of a claim. Takes a dict of `root` and `volume` (models or runs). */}}
{{- define "tandem.claim" -}}
{{ (get .root.Values .volume).existingClaim | default (printf "%s-%s" .root.Release.Name .volume) }}
{{- end }}

{{/* Refuses values that contradict each other. */}}
{{- define "tandem.validate" -}}
{{- $values := .Values -}}
{{- if gt (len .Release.Name) 30 }}
{{- fail "the name of the release has more than 30 characters: names of pods would be too long" }}
{{- end }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name) }}
{{- fail (printf "the name of the release, %s, begins with a digit or has a dot: no Service can have it" .Release.Name) }}
{{- end }}
{{- if not (or (include "tandem.tls" .) .Values.insecure) }}
{{- fail "tls.secretName: name a Secret with tls.crt, tls.key and ca.crt, or give tls.issuerRef; insecure: true serves without TLS" }}
{{- end }}
{{- range $role := include "tandem.roles" . | fromYamlArray }}
{{- $server := get $values $role }}
{{- $rollout := eq $role "rollout" }}
{{- $model := ternary (dig "senior" "model" "" $server.config | default $server.config.senior_model) $server.config.model $rollout }}
{{- if not $model }}
{{- fail (printf "%s.config.%s: required" $role (ternary "senior.model" "model" $rollout)) }}
{{- end }}
{{- if mod (int $server.ranks) (int $server.ranksPerPod) }}
{{- fail (printf "%s.ranksPerPod: %d does not divide %s.ranks, %d" $role (int $server.ranksPerPod) $role (int $server.ranks)) }}
{{- end }}
{{- if and (gt (include "tandem.podsOfServer" $server | int) 1) (not $values.ranks.privateNetwork) }}
{{- fail (printf "%s.ranks: servers of several ranks need ranks.privateNetwork: true, because the channel between ranks is neither encrypted nor authenticated" $role) }}
{{- end }}
{{- end }}
{{- if and .Values.run.enabled (not .Values.run.config.run_dir) }}
{{- fail "run.config.run_dir: required, a directory below /runs" }}
{{- end }}
{{- if and .Values.run.enabled (not (hasPrefix "/runs/" .Values.run.config.run_dir)) }}
{{- fail (printf "run.config.run_dir: must be below /runs, not %s" .Values.run.config.run_dir) }}
{{- end }}
{{- range $key := list "servers" "cluster" }}
{{- if hasKey $values.run.config $key }}
{{- fail (printf "run.config.%s: the chart sets the servers" $key) }}
{{- end }}
{{- end }}
{{- end }}
