{{/* Pod template of the run. */}}
{{- define "tandem.runPod" -}}
{{- $run := .Values.run }}
{{- /* After an upgrade the pod of the earlier Job may still end its step and save. */}}
{{- $wait := add (int $run.graceSeconds) 60 | toString }}
{{- $arguments := list "tandem" $run.command "/etc/tandem/run/run.yaml" "--resume" "auto" "--wait-for-lock" $wait }}
{{- $rollouts := list }}
{{- range $index := until (int .Values.rollout.replicas) }}
{{- $rollouts = append $rollouts (include "tandem.address" (dict "root" $ "role" "rollout" "index" $index)) }}
{{- end }}
{{- $arguments = append $arguments (printf "servers.rollout=[%s]" (join ", " $rollouts)) }}
{{- $arguments = append $arguments (printf "servers.trainer=%s" (include "tandem.address" (dict "root" . "role" "trainer" "index" 0))) }}
{{- $arguments = append $arguments "servers.start_timeout_seconds=1800" }}
{{- if .Values.critic.enabled }}
{{- $arguments = append $arguments (printf "servers.critic=%s" (include "tandem.address" (dict "root" . "role" "critic" "index" 0))) }}
{{- end }}
metadata:
  labels:
    {{- include "tandem.selector" (dict "root" . "component" "client") | nindent 4 }}
    {{- with $run.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Changed files make another Job.
    checksum/run: {{ list $run.config $run.files | toJson | sha256sum }}
    {{- with $run.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "tandem.podSecurity" . | nindent 2 }}
  {{- include "tandem.placement" $run | nindent 2 }}
  restartPolicy: Never
  terminationGracePeriodSeconds: {{ $run.graceSeconds }}
  {{- include "tandem.waitForModels" (dict "root" . "image" .Values.client.image) | nindent 2 }}
  containers:
    - name: client
      image: {{ include "tandem.image" (dict "root" . "name" .Values.client.image) }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: {{ toJson $arguments }}
      env:
        - {name: HOME, value: /scratch}
        - {name: TMPDIR, value: /scratch}
        {{- if include "tandem.tls" . }}
        - {name: TANDEM_CA_FILE, value: /etc/tandem/tls/ca.crt}
        - {name: TANDEM_CERTIFICATE_FILE, value: /etc/tandem/tls/tls.crt}
        - {name: TANDEM_PRIVATE_KEY_FILE, value: /etc/tandem/tls/tls.key}
        {{- end }}
        {{- if .Values.tokens.secretName }}
        - {name: TANDEM_TOKEN_FILE, value: /etc/tandem/tokens/client}
        {{- end }}
        {{- with $run.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $run.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "tandem.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: run, mountPath: /etc/tandem/run, readOnly: true}
        - {name: models, mountPath: /models, readOnly: true}
        - {name: runs, mountPath: /runs}
        - {name: scratch, mountPath: /scratch}
        {{- with $run.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if include "tandem.tls" . }}
        - {name: tls, mountPath: /etc/tandem/tls, readOnly: true}
        {{- end }}
        {{- if .Values.tokens.secretName }}
        - {name: tokens, mountPath: /etc/tandem/tokens, readOnly: true}
        {{- end }}
  volumes:
    - name: run
      configMap: {name: {{ .Release.Name }}-run}
    - name: models
      persistentVolumeClaim: {claimName: {{ include "tandem.claim" (dict "root" . "volume" "models") }}}
    - name: runs
      persistentVolumeClaim: {claimName: {{ include "tandem.claim" (dict "root" . "volume" "runs") }}}
    - name: scratch
      emptyDir: {sizeLimit: {{ $run.scratchSize }}}
    {{- with $run.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if include "tandem.tls" . }}
    - name: tls
      secret: {secretName: {{ include "tandem.clientTlsSecret" . }}, defaultMode: 0440}
    {{- end }}
    {{- with .Values.tokens.secretName }}
    - name: tokens
      secret:
        secretName: {{ . }}
        defaultMode: 0440
        items: [{key: client, path: client}]
    {{- end }}
{{- end }}
