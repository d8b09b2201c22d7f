{{/* JSON list of the models to download from the hub: neither the demo pair, directories nor early exits. */}}
{{- define "gammaray.hubModels" -}}
{{- $models := list -}}
{{- $names := list .Values.models.target -}}
{{- if ne (toString .Values.draft.workers) "0" -}}
{{- $names = append $names .Values.models.draft -}}
{{- end -}}
{{- range uniq $names -}}
{{- if not (or (eq . "demo") (hasPrefix "/" .) (hasPrefix "." .) (hasPrefix "early-exit:" .)) -}}
{{- $models = append $models . -}}
{{- end -}}
{{- end -}}
{{- toJson $models -}}
{{- end -}}

{{/* "true" if a Job downloads models into the shared cache before other pods start. */}}
{{- define "gammaray.downloads" -}}
{{- if and .Values.modelCache.enabled .Values.modelCache.download.enabled (include "gammaray.hubModels" . | fromJsonArray) -}}
true
{{- end -}}
{{- end -}}

{{/* Path of the file that marks the download of these models as complete. */}}
{{- define "gammaray.modelsMark" -}}
/models/ready/{{ include "gammaray.hubModels" . | sha256sum | trunc 16 }}
{{- end -}}

{{/* Init container of a Ray pod that waits for that file: (dict "root" $ "image" name). */}}
{{- define "gammaray.waitForModels" -}}
- name: wait-for-models
  image: {{ include "gammaray.image" (dict "root" .root "name" .image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  securityContext: {{- include "gammaray.containerSecurity" . | nindent 4 }}
  command:
    - timeout
    - {{ .root.Values.modelCache.download.timeoutSeconds | quote }}
    - sh
    - -c
    - until [ -e "$0" ]; do sleep 2; done
    - {{ include "gammaray.modelsMark" .root }}
  resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {cpu: 100m, memory: 64Mi}}
  volumeMounts:
    - {name: models, mountPath: /models, readOnly: true}
{{- end -}}

{{/* Spec of the pod that downloads models. */}}
{{- define "gammaray.downloadPod" -}}
restartPolicy: OnFailure
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- include "gammaray.podSecurity" 1000 | nindent 2 }}
containers:
  - name: download
    image: {{ include "gammaray.image" (dict "root" . "name" "orchestrator") }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    securityContext: {{- include "gammaray.containerSecurity" . | nindent 6 }}
    command:
      - python
      - -c
      - {{ .Files.Get "files/download_models.py" | quote }}
      - {{ include "gammaray.modelsMark" . }}
      {{- range include "gammaray.hubModels" . | fromJsonArray }}
      - {{ . | quote }}
      {{- end }}
    env:
      - {name: HOME, value: /tmp}
      - {name: HF_HOME, value: /models/huggingface}
      {{- with .Values.huggingFaceTokenSecret }}
      {{- if .name }}
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
      {{- end }}
      {{- end }}
      {{- with .Values.pods.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    resources: {{- toYaml .Values.modelCache.download.resources | nindent 6 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: models, mountPath: /models}
volumes:
  - name: tmp
    emptyDir: {sizeLimit: 1Gi}
  - name: models
    persistentVolumeClaim:
      claimName: {{ .Values.modelCache.existingClaim | default (printf "%s-models" (include "gammaray.fullname" .)) }}
{{- end -}}
